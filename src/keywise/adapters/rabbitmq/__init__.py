"""RabbitMQ as a source: consumes an existing queue, and delays messages with queues of its own."""
