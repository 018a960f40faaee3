"""Which adapter lies in which slot of the layers' buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from inferd.engine.errors import EngineError


class SlotTable:
    """Adapters stay in their slots until others need them; the one that was used longest ago goes first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._slots: OrderedDict[int, int] = OrderedDict()  # adapter id → slot, longest unused first

    def __getitem__(self, adapter_id: int) -> int:
        """Raises KeyError for one that has no slot."""
        return self._slots[adapter_id]

    def place(self, adapter_ids: Collection[int]) -> list[int]:
        """Give each of them a slot, all at once; those whose slot is new, and holds something else still.

        Raises EngineError when there are more than slots.
        """
        if len(adapter_ids) > self._num_slots:
            raise EngineError(f"a step has {len(adapter_ids)} adapters, there are max_loras={self._num_slots} slots")
        for adapter_id in adapter_ids:
            if adapter_id in self._slots:
                self._slots.move_to_end(adapter_id)
        missing = [adapter_id for adapter_id in adapter_ids if adapter_id not in self._slots]
        for adapter_id in missing:
            self._slots[adapter_id] = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        return missing

    def release(self, adapter_id: int) -> None:
        """Of no effect for one that has no slot."""
        slot = self._slots.pop(adapter_id, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        for adapter_id in list(self._slots):
            self.release(adapter_id)
