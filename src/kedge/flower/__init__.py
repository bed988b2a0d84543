"""Real federations: members answer requests as bytes, a coordinator runs the rounds.

Nothing here knows the transport: :class:`~kedge.flower.member.Member` turns bytes into bytes, and
:class:`~kedge.flower.coordinator.Coordinator` runs over any
:class:`~kedge.flower.transport.Transport`.
"""
