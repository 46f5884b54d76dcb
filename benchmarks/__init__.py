"""What keywise costs beside a bare loop that does the same work: `make bench`."""
