"""A federated run as the server sees it, whoever trains: a simulator or remote clients."""

from kedge.session.session import NEVER, Broadcast, Done, Request, Session, drive
from kedge.session.terms import DataSchema, Terms

__all__ = [
    "NEVER",
    "Broadcast",
    "DataSchema",
    "Done",
    "Request",
    "Session",
    "Terms",
    "drive",
]
