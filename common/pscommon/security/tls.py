"""TLS of one process: contexts from the files of --tls-*, which are read again when they change."""

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pscommon.core.errors import PSError
from pscommon.security.tls_files import (
    TlsFiles,
    TlsMaterial,
    expiry_warning,
    moment,
    read_tls,
)
from pscommon.telemetry.logs import get_logger

CHECK_SECONDS = 10.0
DAY_SECONDS = 86400.0

log = get_logger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


class Tls:
    """Certificate, key and CA of this process, as they are now. Thread-safe.

    Files that are replaced are used once they fit together; until then the earlier ones are.

    Attributes:
        files: Where they are.
        generation: Grows when other files are used.
    """

    def __init__(
        self,
        files: TlsFiles,
        needs_name: str | None = None,
        read: Callable[[TlsFiles, str | None], TlsMaterial] = read_tls,
    ) -> None:
        """Read the files. Raises what `read_tls` raises.

        needs_name: DNS name that the certificate must have: SERVER_NAME on servers.
        """
        self.files, self.generation = files, 0
        self._needs_name, self._read = needs_name, read
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._refused: Stamp | None = None
        self._material = read(files, needs_name)
        self._contexts = _make_contexts(files, self._material)

    @property
    def material(self) -> TlsMaterial:
        """The files that are used; changed files are read."""
        self._refresh()
        return self._material

    def refreshed_generation(self) -> int:
        """Return the generation, after a look at the files."""
        self._refresh()
        return self.generation

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a stream port: its clients present a certificate."""
        return self._refresh()[0]

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a client of a stream port; wrap with SERVER_NAME."""
        return self._refresh()[1]

    def https_context(self) -> ssl.SSLContext:
        """Return the context of a metrics port: its clients present no certificate."""
        return self._refresh()[2]

    def watch(self, ended: threading.Event, now: Callable[[], float] = time.time) -> None:
        """Look at the files until `ended`, and warn once a day if the certificate expires soon.

        now: Returns the Unix time in seconds.
        """
        next_warning = 0.0
        while not ended.wait(CHECK_SECONDS):
            present = now()
            warning = expiry_warning(self.material.expires, present)
            if warning is not None and present >= next_warning:
                next_warning = present + DAY_SECONDS
                log.warning("certificate_expires", problem=warning)

    def _refresh(self) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            stamp = _stamp(self.files)
            if stamp not in (self._stamp, self._refused):
                try:
                    material = self._read(self.files, self._needs_name)
                    contexts = _make_contexts(self.files, material)
                except (PSError, OSError) as error:
                    # a file may be written just now, or its companion comes next
                    self._refused = stamp
                    log.warning("tls_files_unusable", problem=str(error))
                else:
                    self._material, self._contexts = material, contexts
                    self._stamp, self._refused = stamp, None
                    self.generation += 1
                    log.info("tls_files_replaced", expires=moment(material.expires))
            return self._contexts


def _stamp(files: TlsFiles) -> Stamp:
    return tuple(map(_stamp_of, (files.ca, files.cert, files.key)))


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        facts = path.stat()
    except OSError:
        return 0, 0, 0
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _make_contexts(
    files: TlsFiles, material: TlsMaterial
) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of stream servers, stream clients and metrics ports."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    https = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=material.ca.decode())
    server.num_tickets = 0  # no connection is resumed, and a ticket would come before the answer
    for context in (server, client, https):
        context.load_cert_chain(files.cert, files.key)
    return server, client, https
