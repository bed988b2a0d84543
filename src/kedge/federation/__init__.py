"""Real federations, whatever carries their messages.

A :class:`~kedge.federation.member.member.Member` answers requests as bytes, and a
:class:`~kedge.federation.coordinator.coordinator.Coordinator` runs the rounds over any
:class:`~kedge.federation.messages.Transport`.
"""
