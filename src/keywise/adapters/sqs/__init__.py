"""Amazon SQS as a source."""
