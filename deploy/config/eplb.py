"""Configuration of expert-parallel load balancing (``--enable-eplb``), in vLLM's format."""

from __future__ import annotations

import msgspec

from quintet.deploy.config.flags import Options
from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.share import Share
from quintet.executor.model_config.spec import DecoderSpec
from quintet.wire.config import EplbConfig
from quintet.wire.errors import ConfigError

FLAG, DETAILS, NUMBER = "--enable-eplb", "--eplb-config", "num_redundant_experts"


class _EplbJson(msgspec.Struct, forbid_unknown_fields=True):
    window_size: int = EplbConfig.__struct_defaults__[0]
    step_interval: int = EplbConfig.__struct_defaults__[1]
    num_redundant_experts: int = 0
    use_async: bool = True
    """Accepted and ignored: experts are always copied asynchronously, between steps."""
    log_balancedness: bool = False
    """Accepted and ignored, as the following keys of vLLM."""
    log_balancedness_interval: int = 1
    policy: str | None = None
    communicator: str | None = None


def eplb_config(options: Options) -> EplbConfig | None:
    """Return the section, or None without ``--enable-eplb``. Raises `ConfigError`."""
    if not options.enable_eplb:
        if options.eplb_config is not None:
            raise ConfigError(f"{DETAILS} requires {FLAG}: add {FLAG}, or drop {DETAILS}")
        return None
    if not options.enable_expert_parallel:
        raise ConfigError(f"{FLAG} requires --enable-expert-parallel: add it, or drop {FLAG}")
    ranks = options.tensor_parallel_size
    example = f'{{"{NUMBER}": {ranks}}}'
    try:
        parsed = msgspec.json.decode(options.eplb_config or "{}", type=_EplbJson)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{DETAILS} {options.eplb_config}: {error}; write JSON such as {example}") from None
    for name, number in (("window_size", parsed.window_size), ("step_interval", parsed.step_interval)):
        if not 0 < number < 1 << 31:
            raise ConfigError(f"{DETAILS}: {name} is {number}; it must be a positive number of steps")
    copies = parsed.num_redundant_experts
    if copies <= 0 or copies % ranks:
        raise ConfigError(
            f"{FLAG}: {NUMBER} is {copies}; it must be a positive multiple of the {ranks} ranks, such as"
            f" {DETAILS} '{example}'"
        )
    return EplbConfig(parsed.window_size, parsed.step_interval, copies)


def check_copies(eplb: EplbConfig, spec: DecoderSpec, share: Share) -> None:
    """Reject more redundant experts than can be used."""
    fewest = min(each.mlp.routing.experts for each in spec.layers if isinstance(each.mlp, ExpertsSpec))
    most = (fewest - -(-fewest // share.size)) * share.size
    if eplb.num_redundant_experts > most:
        raise ConfigError(
            f"{DETAILS}: {NUMBER} is {eplb.num_redundant_experts}; with {share.size} ranks and {fewest} experts it must be at"
            f" most {most}"
        )


def num_copied(eplb: EplbConfig, spec: DecoderSpec) -> int:
    """Return the number of parameters of all redundant experts."""
    widths = (each.mlp.width for each in spec.layers if isinstance(each.mlp, ExpertsSpec))
    return eplb.num_redundant_experts * 3 * spec.hidden_size * sum(widths)
