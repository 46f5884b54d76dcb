"""Amazon DynamoDB as a sink and as an origin: items with versions, written on conditions and read by segments."""
