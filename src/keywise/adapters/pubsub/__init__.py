"""Google Cloud Pub/Sub as a source."""
