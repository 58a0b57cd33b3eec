"""An update as its trainer announces it: one value from the request to the engine."""

from dataclasses import dataclass, replace

from treadle.rollout_server.engine import CollectiveGroup, InFlightPolicy, TensorSpec
from treadle.rollout_server.updates.delta import DeltaEncoding
from treadle.rollout_server.updates.files import WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """BeginUpdate, decoded. `services/begin.py` holds the rules between the fields.

    Attributes:
        update_id: The trainer's name for the update.
        weight_version: Version of the weights after the commit.
        tensors: All tensors of the model.
        lease_s: How long the server waits for its trainer.
        in_place: The treatment of in-flight completions when an update in place begins; None: the
            update is staged.
        source: Files, or the group of the collective transport; None: the bytes are pushed. A
            group only in place.
        delta: How the bytes are encoded; None: they are the tensors. Staged only.
        keep_base: Whether the server keeps the bytes as the base of a delta. The result of a
            delta is always kept. Staged only.
    """

    update_id: str
    weight_version: int
    tensors: tuple[TensorSpec, ...]
    lease_s: float
    in_place: InFlightPolicy | None = None
    source: CollectiveGroup | WeightFiles | None = None
    delta: DeltaEncoding | None = None
    keep_base: bool = False

    @property
    def is_in_place(self) -> bool:
        """Whether tensors overwrite the engine's as they arrive."""
        return self.in_place is not None

    def repeats(self, first: "Begin") -> bool:
        """Returns whether this announces the same update again.

        The lease and the in-flight policy may differ: those of the first call apply.
        """
        same = replace(self, lease_s=first.lease_s, in_place=first.in_place) == first
        return same and self.is_in_place == first.is_in_place
