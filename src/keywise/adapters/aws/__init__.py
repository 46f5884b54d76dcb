"""What the adapters of Amazon's services share: sessions, endpoints and errors."""
