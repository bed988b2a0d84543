"""Who may ask. The page is for one user on one machine, and for nobody whom it was not given to.

Every request needs a ``Host`` that is this machine (a page elsewhere that points its own name here,
DNS rebinding, has another one) and the token: in the address once, then in a cookie that scripts
cannot read and other sites cannot send. A request that changes something also needs an ``Origin``
that is this page, and a key that only this page knows.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Header of requests that change something.
KEY_HEADER = "x-kedge-key"
#: Plot writes its colours as a style element, hence inline styles; scripts are files only.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: A report has its scripts inside. It has no origin, so it cannot ask the board anything.
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-modals; default-src 'none'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
DENIED = "This board needs the address that kedge board printed, with its token.\n"
WRONG_HOST = "This board is not known by that name; use the address that kedge board printed.\n"
WRONG_ORIGIN = "Only the page of this board may change anything.\n"


class Guard:
    """Wraps an application: refuses strangers, and adds the headers of every answer.

    Args:
        app: the application.
        host: the address that the board listens on.
        port: its port, which names the cookie: boards on other ports have their own.
        token: what the user's address has.
        key: what the page sends along with changes.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, token: str, key: str) -> None:
        self.app, self.token, self.key = app, token, key
        self.cookie = f"kedge-board-{port}"
        self.names = {"localhost", host.lower().strip("[]")}
        self.is_local = is_loopback(host)
        if not self.is_local:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        given = False

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                extra = {n.lower().encode(): v.encode() for n, v in HEADERS.items()}
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in extra.items() if name not in present),
                ]
                if given:
                    text = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                    message["headers"].append((b"set-cookie", text.encode()))
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, answer)
            return
        given = scope["path"] == "/" and self._in_address(scope)
        await self.app(scope, receive, answer)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a stranger; None for the user."""
        if scope["type"] != "http":
            return PlainTextResponse("", 403)
        headers = Headers(scope=scope)
        if not self.knows(headers.getlist("host")):
            return PlainTextResponse(WRONG_HOST, 421)
        in_cookie = HTTPConnection(scope).cookies.get(self.cookie, "")
        is_read = scope["method"] in ("GET", "HEAD")
        if not _same(in_cookie, self.token) and not (
            is_read and scope["path"] == "/" and self._in_address(scope)
        ):
            return PlainTextResponse(DENIED, 403)
        if is_read:
            return None
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "same-origin")
        own = origin.lower() == f"http://{headers['host'].lower()}"
        if not own or site != "same-origin" or not _same(headers.get(KEY_HEADER, ""), self.key):
            return PlainTextResponse(WRONG_ORIGIN, 403)
        return None

    def _in_address(self, scope: Scope) -> bool:
        found = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        return len(found) == 1 and _same(found[0], self.token)

    def knows(self, hosts: Iterable[str]) -> bool:
        """Whether a request's ``Host`` is this machine. The port is not compared, since it may be
        forwarded; a number cannot be rebound."""
        hosts = list(hosts)
        if len(hosts) != 1:
            return False
        try:
            name = (urlsplit(f"//{hosts[0]}").hostname or "").rstrip(".")
            port = urlsplit(f"//{hosts[0]}").port  # raises if it is no number
        except ValueError:
            return False
        if not name or port == 0:
            return False
        if name in self.names:
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return number.is_loopback or not self.is_local


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _same(given: str, wanted: str) -> bool:
    return secrets.compare_digest(given.encode(), wanted.encode())
