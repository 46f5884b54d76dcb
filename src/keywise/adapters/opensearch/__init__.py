"""OpenSearch and Elasticsearch as a sink."""
