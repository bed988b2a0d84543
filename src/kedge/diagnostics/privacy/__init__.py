"""What a method shares, and what an attacker can make of it."""

from kedge.diagnostics.privacy.sheet import diagnose_privacy as diagnose_privacy
