"""The SQS service that queues live in, as a URL names it."""

import re

from keywise.adapters.aws.service import AwsService
from keywise.adapters.sqs.errors import SQS_CODES
from keywise.core.errors import AddressError
from keywise.core.url import Address, redacted

LONG_POLL_S = 20
"""The longest that SQS allows."""
OPTIONS = ("region", "profile", "tls")
"""What a URL may say about the connection."""

_REGION = re.compile(r"(?:^|\.)sqs(?:-fips)?\.([a-z0-9-]+)\.(?:vpce\.|api\.)?(?:amazonaws|amazonwebservices)\.")


def sqs_service(name: str, endpoint: str, region: str = "", profile: str = "") -> AwsService:
    return AwsService(SQS_CODES, name, endpoint, region, profile)


def service_at(address: Address, options: dict[str, str]) -> AwsService:
    """The service of a URL. Credentials come from the environment, a profile or a role, never from the URL."""
    url = redacted(address.url)
    if not address.host or "," in address.host:
        raise AddressError(f"{url} names no host; write for example sqs://sqs.eu-west-1.amazonaws.com/ACCOUNT/QUEUE")
    if "@" in address.host:
        raise AddressError(
            f"{url} has a user; credentials never belong into the URL: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, name a profile with profile=, or give the machine a role"
        )
    address.check_ports()
    if (tls := options.get("tls", "on")) not in ("on", "off"):
        raise AddressError(f"{url}: tls={tls} has to be on or off")
    region = options.get("region", "")
    if not region and (found := _REGION.search(address.host)):
        region = found[1]
    if not region and "amazonaws." in address.host:
        raise AddressError(f"{url} does not show its region; add for example region=eu-west-1")
    scheme = "https" if tls == "on" else "http"
    return sqs_service(url, f"{scheme}://{address.host}", region, options.get("profile", ""))
