"""Models that only propose drafts, from hidden states of the served model: their registry."""

from __future__ import annotations

from quintet.executor.model_config import eagle, medusa, mtp
from quintet.executor.model_config.family import Family

DRAFT_HEADS = {
    eagle.ARCHITECTURE: Family(eagle.read_eagle, "EAGLE draft heads", "quintet.executor.models.mtp:MtpHead"),
    eagle.ARCHITECTURE_3: Family(
        eagle.read_eagle3, "EAGLE-3 draft heads", "quintet.executor.models.eagle:EagleHead"
    ),
    medusa.ARCHITECTURE: Family(
        medusa.read_medusa, "Medusa heads", "quintet.executor.models.medusa:MedusaHeads"
    ),
    mtp.ARCHITECTURE: Family(
        mtp.read_mtp, "multi-token prediction layers", "quintet.executor.models.mtp:MtpHead"
    ),
}
"""By architecture."""

HeadSpec = eagle.EagleSpec | mtp.MtpSpec | medusa.MedusaSpec
