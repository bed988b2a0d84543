"""A federated run as the server sees it, whoever trains: a simulator or remote clients."""

from kedge.session.session import NEVER, Answer, Ask, Down, Session
from kedge.session.terms import DataSchema, Terms

__all__ = ["NEVER", "Answer", "Ask", "DataSchema", "Down", "Session", "Terms"]
