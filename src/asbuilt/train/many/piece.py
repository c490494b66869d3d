"""What a rank gives to PyTorch's distributed checkpoints: the tensor it holds, with its place in the whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from asbuilt.train.many.extent import Extent


class Piece(Tensor):
    """A view of a rank's tensor that names its place; it is what `torch.distributed.checkpoint` calls checkpointable.

    It reads and writes the view. DTensor's own description knows neither columns that are divided before rows, nor rows
    that pad a vocabulary.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    view_of: Tensor
    place: Extent

    @staticmethod
    def of(tensor: Tensor, extent: Extent) -> Piece:
        """Returns the piece of a tensor, which may be divided further over ranks, of a weight with this extent."""
        begins = (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
            begins, tensor = tuple(chunk.offsets), tensor.to_local()
        held = zip(tensor.shape, begins, extent.sizes, strict=True)
        sizes = tuple(max(0, min(n, most - begin)) for n, begin, most in held)
        offsets = tuple(at + begin for at, begin in zip(extent.offsets, begins, strict=True))
        view = tensor.detach()
        for dim, size in enumerate(sizes):
            view = view.narrow(dim, 0, size)
        made = view.as_subclass(Piece)
        made.view_of, made.place = view, Extent(shape=extent.shape, offsets=offsets, sizes=sizes)
        return made

    def size(self) -> torch.Size:  # type: ignore[override]  # what the reader compares with the file's
        """Returns the shape of the whole tensor."""
        return torch.Size(self.place.shape)

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        """Returns what is written of it: all, or nothing if it is empty."""
        properties = TensorProperties.create_from_tensor(self.view_of)
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Returns its place, or nothing if it is empty."""
        place = self.place
        chunk = ChunkStorageMetadata(offsets=torch.Size(place.offsets), sizes=torch.Size(place.sizes))
        return [chunk] if self.view_of.numel() else []

    def __get_tensor_shard__(self, index: Any) -> Tensor:  # noqa: ANN401
        """Returns the tensor itself, to be written or filled."""
        return self.view_of
