"""TLS of HTTP clients: the authorities they trust, and error messages for peers that they cannot trust."""

import socket
import ssl
from pathlib import Path

from elasticrec.errors import ConfigError

_PROBE_S = 2.0

# OpenSSL's X509_V_ERR_* codes.
_NOT_YET, _EXPIRED = 9, 10
_OTHER_HOST = (62, 64)
_OTHER_AUTHORITY = (2, 7, 18, 19, 20, 21)


class TlsError(ConfigError):
    """A certificate that is not accepted, or TLS at one end only: another attempt would fail the same way."""


def client_context(ca: Path | None) -> ssl.SSLContext:
    """Return a context that trusts the authorities of the `ca` file, or those of the system if it is None."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        reason = "expected certificates in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"tls: {ca}: cannot be used: {reason}") from None


def tls_problem(error: ssl.SSLError, host: str) -> str | None:
    """Return the problem that another attempt would not solve, or None if it might."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return "its certificate has expired"
        if error.verify_code == _NOT_YET:
            return "its certificate is not valid yet"
        if error.verify_code in _OTHER_HOST:
            return f"its certificate is for another host: expected `{host}`"
        if error.verify_code in _OTHER_AUTHORITY:
            return "its certificate is not signed by an authority of the `ca` file"
        return f"its certificate cannot be used: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return None
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"):
        return "expected TLS, got something else: TLS is off at the other end"
    return f"tls: {(error.reason or str(error)).lower().replace('_', ' ')}"


def speaks_tls(host: str, port: int) -> bool:
    """Whether a server that closed a plain connection speaks TLS; sends nothing but a TLS hello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False
