"""Allowed imports between packages, from the lowest to the highest; `make house` prints them."""


def of(**names: str) -> set[str]:
    """Return package names: of(pscommon="core wire") is pscommon.core and pscommon.wire."""
    return {f"{top}.{name}" for top, text in names.items() for name in text.split()}


ALLOWED: dict[str, set[str]] = {
    "pscommon.core": set(),
    "pscommon.entry": set(),
    "pscommon.settings": of(pscommon="core"),
    "pscommon.system": of(pscommon="core"),
    "pscommon.optim": of(pscommon="core system"),
    "pscommon.parameters": of(pscommon="core optim system"),
    "pscommon.snapshot": of(pscommon="core optim"),
    "pscommon.telemetry": set(),
    "pscommon.environments": of(pscommon="core settings telemetry"),
    "pscommon.security": of(pscommon="core system telemetry"),
    "pscommon.tracing": of(pscommon="core"),
    "pscommon.wal": set(),
    "pscommon.wire": of(pscommon="core security telemetry"),
    "psserver.core.data": of(pscommon="core"),
    "psserver.core.shard": of(pscommon="core"),
    "psserver.core.workers": of(pscommon="core"),
    "psserver.core.job": of(pscommon="core", psserver="core.data core.workers"),
    "psserver.parameters": of(pscommon="core optim parameters system wire"),
    "psserver.waiting": set(),
    "psserver.process": of(
        pscommon="core security settings snapshot system telemetry tracing wire",
        psserver="core.job waiting",
    ),
    "psworker.core": of(pscommon="core tracing"),
    "psworker.examples": {"psworker"},
    "psworker.model": of(pscommon="core optim system telemetry"),
    "psworker.session": of(
        pscommon="core environments security settings telemetry tracing wire", psworker="core"
    ),
    "psworker.data": of(pscommon="core telemetry", psworker="core session"),
    "psworker.supervision": of(pscommon="core settings system telemetry", psworker="session"),
    "psworker.local_servers": of(pscommon="core security", psworker="supervision"),
    "psworker.steps": of(
        pscommon="core optim parameters system telemetry tracing", psworker="core model session"
    ),
    "psworker.optim": of(
        pscommon="core optim snapshot system telemetry",
        psworker="core model session steps",
    ),
    "psworker.transport": of(
        pscommon="core security settings system telemetry wire",
        psworker="core",
    ),
    "psworker.connection": of(
        pscommon="core security settings system telemetry tracing wire",
        psworker="core session transport",
    ),
    "psworker.group": of(
        pscommon="core system telemetry wire",
        psworker="connection core model session",
    ),
    "psworker.job": of(pscommon="core telemetry", psworker="core data group optim session"),
    "psworker.integrations": of(pscommon="core", psworker="data job"),
    "psworker.ctl": {"pscommon"}
    | of(
        pscommon="core entry environments security settings snapshot system telemetry tracing wire",
        psworker="connection core supervision session",
    ),
    "psworker.exchange": of(
        pscommon="core settings system telemetry tracing wire",
        psworker="connection core session transport",
    ),
    "psworker.client": of(
        pscommon="core optim settings snapshot system telemetry tracing wire",
        psworker="connection core exchange session transport",
    ),
    "psworker.connect": of(pscommon="core system", psworker="client core group job session"),
    "psworker.cli": of(
        pscommon="core entry environments optim security settings system telemetry",
        psworker="connect group supervision session",
    ),
    "psworker.run": of(
        pscommon="core entry security settings snapshot system telemetry wire",
        psworker="cli client connection ctl supervision session",
    ),
    "psworker.spark": of(
        pscommon="core security", psworker="connect data local_servers session supervision"
    ),
    "psworker.training_nodes": of(pscommon="core system telemetry", psworker="client job session"),
    "psserver.core.coordinator": of(
        pscommon="core",
        psserver="core.data core.job core.shard core.workers",
    ),
    "psserver.core.commands": of(
        pscommon="core",
        psserver="core.coordinator core.job core.workers",
    ),
    "psserver.core.servers": of(
        pscommon="core",
        psserver="core.commands core.coordinator core.shard",
    ),
    "psserver.durability": of(
        pscommon="core optim parameters snapshot system telemetry tracing wal wire",
        psserver="core.commands core.coordinator core.job core.shard parameters process",
    ),
    "psserver.monitoring": of(
        pscommon="core system telemetry tracing",
        psserver="core.commands core.coordinator core.data core.workers process",
    ),
    "psserver.replication": of(
        pscommon="core optim snapshot system telemetry wal wire",
        psserver="core.commands core.coordinator core.shard durability parameters process waiting",
    ),
    "psserver.shard": of(
        pscommon="core parameters settings system telemetry tracing",
        psserver="core.job core.shard durability parameters process waiting",
    ),
    "psserver.peers": of(
        pscommon="core optim security settings snapshot system telemetry tracing wire",
        psserver="core.job durability parameters process shard",
    ),
    "psserver.coordinator": of(
        pscommon="core optim snapshot system telemetry tracing wire",
        psserver="core.commands core.coordinator core.data core.job core.servers "
        "core.shard core.workers durability monitoring peers process "
        "replication shard waiting",
    ),
    "psserver.exchange": of(
        pscommon="core system tracing wire",
        psserver="core.shard parameters process shard waiting",
    ),
    "psserver.sockets": of(
        pscommon="core security system telemetry wire",
        psserver="coordinator exchange parameters process shard waiting",
    ),
    "psworker.simulation": of(
        pscommon="core system wire",
        psserver="coordinator core.job core.servers durability exchange process shard waiting",
        psworker="core transport",
    ),
    "psworker.training": of(
        pscommon="core optim settings telemetry",
        psworker="client connect data local_servers session simulation training_nodes",
    ),
    "psserver.roles": of(
        pscommon="system telemetry wire",
        psserver="coordinator durability exchange peers process replication shard sockets",
    ),
    "psserver.server": of(
        pscommon="core security snapshot telemetry tracing wire",
        psserver="coordinator durability monitoring peers process replication roles sockets",
    ),
    "psserver.app": of(
        pscommon="core security system telemetry",
        psserver="coordinator process replication roles server sockets",
    ),
    "psserver.cli": of(
        pscommon="core entry environments optim security settings system telemetry",
        psserver="app process",
    ),
    "psserver.preload": of(pscommon="core system", psserver="cli"),
}
