"""What the conformance suites need to know about a technology to try it."""
