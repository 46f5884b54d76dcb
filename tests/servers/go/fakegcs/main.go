// Fakegcs serves a fake of Google Cloud Storage, in memory, on a port of this machine until it is terminated.
//
// It publishes the notifications of a bucket to the Pub/Sub that PUBSUB_EMULATOR_HOST names.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	port := flag.Uint("port", 4443, "the port to listen on")
	flag.Parse()
	address := fmt.Sprintf("127.0.0.1:%d", *port)
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		Scheme:      "http",
		Host:        "127.0.0.1",
		Port:        uint16(*port),
		ExternalURL: "http://" + address,
		PublicHost:  address,
		Writer:      os.Stderr,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer server.Stop()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
}
