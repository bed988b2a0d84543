"""A federated run as the server sees it, whoever trains: a simulator or remote clients."""

from kedge.session.session import Ask, Down, Session

__all__ = ["Ask", "Down", "Session"]
