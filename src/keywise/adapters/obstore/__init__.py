"""Object stores by obstore, which reads Amazon S3, Google Cloud Storage, folders and memory with one client."""
