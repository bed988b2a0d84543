"""A federated run as the server sees it, whoever trains: a simulator or remote clients."""
