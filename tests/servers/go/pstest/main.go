// Pstest serves Google's in-memory fake of Cloud Pub/Sub on a port of this machine until it is terminated.
package main

import (
	"flag"
	"os"
	"os/signal"
	"syscall"

	"cloud.google.com/go/pubsub/v2/pstest"
)

func main() {
	port := flag.Int("port", 8085, "the port to listen on")
	flag.Parse()
	server := pstest.NewServerWithPort(*port)
	defer server.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
}
