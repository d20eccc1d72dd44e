"""One pooled HTTP session per event loop, for tool calls and, through httpx's transport interface, for the Fleet SDK.

aiohttp, because the pool behind httpx looks at every connection on every request: with 32 requests at once, 2.1 ms of
CPU a request against 0.16 ms here, or 0.5 ms for the SDK, which still builds httpx requests (one core of a laptop,
loopback). An episode is eight requests.
"""

from __future__ import annotations

import asyncio
import weakref

import aiohttp
import httpx

# Below the 5 s after which common servers drop an idle connection: a request must not race that drop, since a request
# lost that way has an unknown outcome.
KEEPALIVE_S = 4.0
CONNECT_TIMEOUT_S = 10.0

# Nothing was sent: the connection was never made.
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)

_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


def http_session() -> aiohttp.ClientSession:
    """The running loop's session. It bounds connecting only: callers set the deadlines of what they ask."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None:
        session = _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_S, ssl=httpx.create_ssl_context(), ttl_dns_cache=60
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
    return session


async def close_http_session() -> None:
    """Close the running loop's session; the next :func:`http_session` opens a new one."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


class SessionTransport(httpx.AsyncBaseTransport):
    """httpx requests over the running loop's session. Replies are read whole."""

    # Set by the session itself, for its own connection and its own decoders.
    _OWN_REQUEST_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})
    # No longer true of a body that was read and decoded.
    _SPENT_REPLY_HEADERS = frozenset({"content-length", "transfer-encoding", "content-encoding", "connection"})

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeout = request.extensions.get("timeout", {})
        try:
            async with http_session().request(
                request.method,
                str(request.url),
                headers=[(k, v) for k, v in request.headers.multi_items() if k not in self._OWN_REQUEST_HEADERS],
                data=await request.aread() or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=timeout.get("connect"), sock_read=timeout.get("read")
                ),
            ) as reply:
                headers = [(k, v) for k, v in reply.headers.items() if k.lower() not in self._SPENT_REPLY_HEADERS]
                return httpx.Response(reply.status, headers=headers, content=await reply.read())
        except aiohttp.ConnectionTimeoutError as error:
            raise httpx.ConnectTimeout(_text(error), request=request) from error
        except NOT_SENT as error:
            raise httpx.ConnectError(_text(error), request=request) from error
        except TimeoutError as error:
            raise httpx.ReadTimeout(_text(error), request=request) from error
        except aiohttp.ClientError as error:
            raise httpx.RemoteProtocolError(_text(error), request=request) from error


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
