// Pstest serves Google's in-memory fake of Cloud Pub/Sub on a port of this machine until it is terminated.
//
// On a second port, tests move its clock and count the messages that are not acked, which Pub/Sub itself does not count.
package main

import (
	"flag"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"cloud.google.com/go/pubsub/v2/pstest"
)

func main() {
	port := flag.Int("port", 8085, "the port to listen on")
	control := flag.Int("control", 0, "the port for tests to control the server; 0 for none")
	flag.Parse()
	server := pstest.NewServerWithPort(*port)
	defer server.Close()
	if *control != 0 {
		go func() { log.Fatal(http.ListenAndServe(fmt.Sprintf("127.0.0.1:%d", *control), controls(server))) }()
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
}

func controls(server *pstest.Server) http.Handler {
	var ahead atomic.Int64
	server.SetTimeNowFunc(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	handler := http.NewServeMux()
	handler.HandleFunc("/advance", func(answer http.ResponseWriter, request *http.Request) {
		by, err := time.ParseDuration(request.FormValue("by"))
		if err != nil {
			http.Error(answer, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprint(answer, time.Duration(ahead.Add(int64(by))).Seconds())
	})
	// A topic with one subscription is assumed: the fake counts acks by message.
	handler.HandleFunc("/unacked", func(answer http.ResponseWriter, request *http.Request) {
		count := 0
		for _, message := range server.Messages() {
			if message.Topic == request.FormValue("topic") && message.Acks == 0 {
				count++
			}
		}
		fmt.Fprint(answer, count)
	})
	return handler
}
