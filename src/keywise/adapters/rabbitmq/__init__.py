"""RabbitMQ as a source."""
