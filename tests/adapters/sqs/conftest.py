"""Every test of SQS has credentials that a local server takes."""

from adapters.aws_credentials import credentials

__all__ = ["credentials"]
