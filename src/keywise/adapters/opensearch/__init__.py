"""OpenSearch and Elasticsearch as a sink: documents with external versions, written by bulk requests."""
