"""What the attention kernels save and need: the fused one, and the reference, which stores all scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from asbuilt.kernels.memory.linear import MappedMemory, of_map
from asbuilt.kernels.memory.registry import Divided, Room, Saved, memory, memory_of
from asbuilt.spec.attention import Attention
from asbuilt.spec.norms import RMSNorm
from asbuilt.spec.part import Pass
from asbuilt.spec.positions import Alibi, RelativeBuckets, Rotary
from asbuilt.spec.relative import Disentangled, RelativeProjection


@memory_of(Attention)
class AttentionMemory(MappedMemory[Attention]):
    """Memory of `kernels.attention`, with its masks, slopes and buckets."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, q and k with RoPE applied, v, and the attention output; scores depend on the kernel.

        Fused: one log-sum-exp per query, and a mask other than causal, which layers share. Reference: the mask unless
        it is added, the probabilities (again if they are cast), and capped scores. Keys and values of an earlier layer
        are saved there.
        """
        common = (
            Saved(name="input", size=run.rows * self.part.input_width),
            *self._saves_heads(run),
            *self._saves_distances(run),
            *self.maps_keep(run),
        )
        return common + (self._saves_scores(run) if self._uses_reference(run) else self._saves_fused(run))

    def _saves_heads(self, run: Pass) -> Iterator[Saved]:
        """Yields q, k, v and the attention output, padded to one width for the fused kernel; gates and their result."""
        part = self.part
        widths = {"q": part.d_head, "k": part.d_head, "v": part.mixed_width}
        padded = widths if self._uses_reference(run) else dict.fromkeys(widths, max(widths.values()))
        for name, width in padded.items():
            lent = part.kv_from is not None and name != "q" and width == widths[name]
            lent = lent and (name == "k" or part.differential is None)  # pairs of values are made anew
            heads = part.n_heads if name == "q" else part.n_kv_heads
            if not lent:
                yield Saved(name=name, size=run.rows * heads * width, divided="width")
        yield Saved(name="mixed", size=run.rows * part.d_mixed, divided="width")
        if part.gating is not None:
            yield Saved(name="gates", size=run.rows * part.d_gate, divided="width")
            yield Saved(name="gated", size=run.rows * part.d_mixed, divided="width")
        if self._mixes_by_key_head(run, padded):
            yield Saved(name="mixed by key head", size=run.rows * part.d_mixed, divided="width")
        if padded["v"] > part.mixed_width:
            yield Saved(name="mixed and zeros", size=run.rows * part.n_heads * padded["v"], divided="width")

    def _mixes_by_key_head(self, run: Pass, padded: dict[str, int]) -> bool:
        """Whether the fused kernel's output has another order than o's input: its own is that of the queries.

        Heads of one number lie at equal distances in either order.
        """
        part = self.part
        apart = part.chooses(run) and part.n_kv_heads > 1 and part.mixed_width > 1 and not self._uses_reference(run)
        return apart and padded["v"] == part.value_width and (run.batch > 1 or padded["q"] > part.d_head)

    def _saves_distances(self, run: Pass) -> Iterator[Saved]:
        """Yields what embedded distances save: copies of queries and keys, what they meet, and all of the products.

        The row of every pair is the same for all layers.
        """
        part, positions = self.part, self.part.positions
        if not isinstance(positions, Disentangled):
            return
        yield Saved(name=f"{positions} rows", size=run.tokens * part.keys(run), width="int64", shared=True)
        heads = {"queries": ("k", positions.to_keys), "keys": ("q", positions.to_queries)}
        for name, map_name in ((name, one) for name, (one, multiplied) in heads.items() if multiplied):
            again = of_map(part.maps[map_name]).keeps(f"{name} met by", positions.n_rows)
            yield from (saved for saved in again if not saved.name.endswith(" bounds"))  # kept once for both uses
            yield Saved(name=name, size=run.rows * part.d_query, divided="width")
            yield Saved(name=f"{name} met", size=positions.n_rows * part.d_query, divided="width")
            yield Saved(name=f"{name} by distance", size=run.rows * part.n_heads * positions.n_rows, divided="width")

    def lends(self, run: Pass) -> tuple[Saved, ...]:
        """The biases of distances by buckets, which one layer of a stack looks up for all."""
        if not isinstance(self.part.positions, RelativeBuckets):
            return ()
        size = self.part.n_heads * self._masked(run)
        return (Saved(name=f"{self._pattern} {self.part.positions} biases", size=size, shared=True, divided="width"),)

    def awaits(self, run: Pass) -> int:
        """Those of the biases of distances."""
        return sum(one.nbytes(run.width) for one in self.lends(run))

    def recomputes(self) -> tuple[str, ...]:
        """Tensors as large as the scores, if a kernel saves them (Korthikanti et al. 2022, arXiv 2205.05198).

        Normalised queries and keys too, as the norms save what they are made of; not keys that later layers read.
        """
        part = self.part
        gated = () if part.gating is None else ("gated",)
        normed = () if part.q_norm is None else ("q",)
        normed += () if part.k_norm is None or part.kv_name is not None else ("k",)
        return ("mask", "capped", "probabilities", "probabilities cast", *gated, *normed)

    def of_heads(self) -> tuple[str, ...]:
        """The norms of queries, keys and values."""
        return ("q_norm", "k_norm", "v_norm", "differential")

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """The norm of values reads what that of keys reads, if values are keys and RoPE does not come first."""
        part = self.part
        return (("v_norm", "k_norm"),) if part.values_are_keys and not part.rotate_first else ()

    def _mask(self, run: Pass) -> Literal["none", "causal", "bool", "added"]:
        """Returns the kind of mask in a pass over the tokens of a whole sequence."""
        part = self.part
        if run.kernel == "engine":
            return "none"
        if part.chooses(run):
            return "bool"
        if isinstance(part.positions, Alibi | RelativeBuckets | RelativeProjection):
            return "added"
        ahead = part.sees_ahead(run) or run.padded or run.documents
        if (part.reach is not None and run.tokens > part.reach) or ahead or part.sparse:
            return "bool"
        if not part.causal or (run.tokens == 1 and part.chunk is None):
            return "none"
        return "causal"

    def mask_peak(self, run: Pass) -> tuple[str, int, int]:
        """Returns the mask's name, its bytes for the whole pass, and the extra bytes of building it.

        It is built by the first layer with this attention pattern, after q, k and v, and shared by the others; but
        that of chosen keys by each layer, as part of its peak.
        """
        part = self.part
        if part.chooses(run):
            return "chosen", 0, 0
        kind, pairs = self._mask(run), self._masked(run)
        positions = part.positions
        if isinstance(positions, RelativeProjection):
            positions = replace(positions, biases=None)  # whose they are changes no mask
        name = f"{self._pattern} {positions if kind == 'added' else ''}"
        if kind == "added":
            each = part.n_heads * pairs
            if isinstance(part.positions, RelativeBuckets):
                made = self._buckets_work(part.positions, run) - each * run.width
            elif isinstance(part.positions, Alibi):
                made = self._slopes_work(run) - each * run.width
            else:
                made = each * (4 + (run.width if run.width < 4 else 0)) + 17 * pairs
            return name, each * run.width, self._projected(run) + made
        if run.padded:
            return name, pairs, pairs
        # of strides distances in int64, and remainders beside them; else a condition of bool beside the others
        each = 17 if part.stride is not None else 2 if part.summary is not None else 1
        each += 2 * (part.window is not None and part.sees_ahead(run))
        return (name, pairs, self._projected(run) + each * pairs) if kind == "bool" else (name, 0, 0)

    @property
    def _pattern(self) -> str:
        """The name of what queries attend to, which tells masks apart."""
        part = self.part
        return f"{part.causal} {part.window} {part.chunk} {part.stride} {part.summary}"

    def _projected(self, run: Pass) -> int:
        """Returns the bytes of the projections of q, k and v."""
        part = self.part
        return sum(part.map_rows(name, run) * part.maps[name].plain.d_out for name in part.inward) * run.width

    def _buckets_work(self, buckets: RelativeBuckets, run: Pass) -> int:
        """Returns the bytes while distances become buckets (both int64 and float32), or buckets become biases."""
        part = self.part
        looked_up = part.n_heads * run.width * (2 if part.causal else 1) + (10 if part.causal else 17)
        return self._masked(run) * max(46 + 8 * buckets.both_ways + part.causal, looked_up)

    def _slopes_work(self, run: Pass) -> int:
        """Returns the bytes while distances are clipped, multiplied in float32, or cast to the pass's dtype."""
        part = self.part
        cast = 0 if run.width == 4 else part.n_heads * (4 + run.width) + 9
        seeing = 0 if part.causal or part.window is None else 18
        return self._masked(run) * max(seeing, part.n_heads * 4 + 13, cast)

    def _masked(self, run: Pass) -> int:
        """Returns the size of a mask: one number per pair, and per sequence if their images or documents are unlike.

        One of chosen keys has one per pair, sequence and key head.
        """
        if self.part.chooses(run):
            return run.rows * self.part.keys(run) * self.part.n_kv_heads
        apart = run.padded or run.documents or self.part.sees_ahead(run)
        return run.tokens * self.part.keys(run) * (run.batch if apart else 1)

    def _saves_fused(self, run: Pass) -> tuple[Saved, ...]:
        part = self.part
        pairs = self._masked(run)
        masks = {
            "bool": (Saved(name=f"mask {self._pattern}", size=pairs, shared=True, divided="none"),),
            "added": (Saved(name=f"{part.positions} {self._pattern}", size=part.n_heads * pairs, shared=True),),
        }
        if part.chooses(run):  # which the library converts to the pass's dtype
            masks["bool"] = (Saved(name="mask", size=pairs, divided="width"),)
        return (
            Saved(name="logsumexp", size=run.rows * part.n_heads, width="wide", divided="width"),
            *masks.get(self._mask(run), ()),
        )

    def _saves_scores(self, run: Pass) -> tuple[Saved, ...]:
        part = self.part
        pairs = run.tokens * part.keys(run)
        size = run.batch * part.n_heads * pairs
        masked = self._mask(run) in ("causal", "bool")
        divided: Divided = "width" if part.chooses(run) else "none"
        mask = (Saved(name="mask", size=self._masked(run), width="bool", divided=divided),) if masked else ()
        mask += self._saves_buckets(run) if isinstance(part.positions, RelativeBuckets) else ()
        capped = () if part.softcap is None else (Saved(name="capped", size=size, divided="width"),)
        if part.softcap is not None and isinstance(part.positions, RelativeProjection):
            capped += (Saved(name="hidden", size=size, width="bool", divided="width"),)
        sinks = run.rows * part.n_heads if part.sinks else 0
        probabilities = Saved(name="probabilities", size=size + sinks, width="wide", divided="width")
        cast = (Saved(name="probabilities cast", size=size, divided="width"),) if run.width < 4 else ()
        return (*mask, *capped, probabilities, *cast)

    def _saves_buckets(self, run: Pass) -> tuple[Saved, ...]:
        """The bucket of every pair, and which pairs are masked: shared by layers with the same attention pattern."""
        part = self.part
        pairs, name = self._masked(run), f"{part.positions} {self._pattern}"
        far = part.reach is not None and run.tokens > part.reach
        hidden = far or run.documents or part.chunk is not None or part.sparse or (run.tokens > 1 and part.causal)
        buckets = Saved(name=f"{name} buckets", size=pairs, width="int64", shared=True)
        return (buckets, Saved(name=f"{name} hidden", size=pairs, width="bool", shared=True)) if hidden else (buckets,)

    def peak_bytes(self, run: Pass) -> int:
        """q, k, v, and q and k after norm or RoPE; plus RoPE's temporaries, or attention output, scores and the result.

        If heads are normalised, RoPE is applied to q and k separately, each beside its norm's output.
        """
        part = self.part
        query, mixed = run.rows * part.d_query * run.width, run.rows * part.d_mixed * run.width
        kv = 0 if part.kv_from is not None else run.rows * part.d_kv * run.width
        projected, result = self._projected(run), run.rows * part.d_model * run.width
        rotary = isinstance(part.positions, Rotary)
        normed = (part.q_norm is not None, part.k_norm is not None)
        apart = any(normed)  # otherwise RoPE is applied to q and k at once
        values = run.rows * part.n_kv_heads * part.value_width * run.width * self._new_values
        turned = (query + kv if rotary or apart else 0) + values
        if isinstance(part.positions, RelativeProjection) and part.positions.biases is not None:
            turned += 2 * query
        one_by_one = max((3 + normed[0]) * query, query + (3 + normed[1]) * kv)
        turning = (one_by_one if apart else 3 * (query + kv)) if rotary else 0
        pairs = run.batch * part.keys(run) * part.n_kv_heads * part.mixed_width * run.width
        doubled = 0 if part.differential is None else pairs
        attending = self._padded(run) + run.rows * part.n_heads * max(4, run.width) + doubled
        if self._mask(run) == "bool":  # which the library converts to the pass's dtype
            attending += self._masked(run) * run.width
        if self._uses_reference(run):
            attending = self._reference_peak(run) + doubled
        if isinstance(part.positions, Disentangled):
            pairs = run.rows * part.n_heads * part.keys(run) * run.width
            attending = max(attending + pairs, self._distances_peak(run, part.positions, pairs))
        if part.differential is not None:
            attending = max(attending, 2 * mixed + memory(part.differential).peak_bytes(run))
        ending = mixed + max(result, 0 if part.gating is None else mixed + 2 * run.rows * part.d_gate * run.width)
        whole = projected + max(turning, turned + attending, turned + ending) + self.peak_beside(run)
        if part.indexer is None:
            return whole
        chosen = turned + mixed + self._masked(run) if part.chooses(run) else 0  # heads in other order, and the mask
        return max(memory(part.indexer).peak_bytes(run), whole + chosen)

    def room(self, run: Pass) -> Room | None:
        """Gradients of the mix and of q, k and v; or RoPE's temporaries, less what is saved but not there at that time.

        Forward and backward RoPE holds three tensors as large as what it rotates, or as `_turning` says. Without norms
        it rotates q and k together, before the mix is saved and after it has been freed; with norms each alone, q
        before rotated keys are saved. When selective checkpointing repeats the block, the mix is there already.
        """
        part = self.part
        if not self._declares_room(run):
            return None
        query, keys = (run.rows * width * run.width for width in (part.d_query, part.n_kv_heads * part.d_head))
        mixed = run.rows * part.d_mixed * run.width
        matrix = max(part.d_model * one.plain.d_out for one in part.maps.values()) * run.width
        if isinstance(part.positions, RelativeBuckets):  # copies of q, k and v beside their product, and scores
            scores = run.rows * part.n_heads * part.keys(run) * run.width
            made = self._projected(run) + scores
            return Room(made, max(2 * scores - mixed, scores + 2 * mixed, mixed + matrix), made)
        backward = mixed + max(self._projected(run), matrix)
        if not isinstance(part.positions, Rotary):
            return Room(0, backward)
        tall, back = self._turning(part.positions)
        if part.q_norm is not None:
            turning = max(tall * query // part.d_head - keys, tall * keys // part.d_head)
            return Room(turning - mixed, backward, turning)
        turning, returning = (times * (query + keys) // part.d_head for times in (tall, back))
        return Room(turning - mixed, max(backward, returning - mixed), turning)

    def _turning(self, rotary: Rotary) -> tuple[int, int]:
        """Returns the most numbers of each head that are there while it is turned, forward and backward.

        Of a head turned in part, these three are as long as that part. Forward it is then joined with the rest;
        backward they are beside a gradient of the rest, which is as long as the head.
        """
        whole, turned = self.part.d_head, rotary.d_rotary
        if turned == whole:
            return 3 * whole, 3 * whole
        return max(3 * turned, whole + turned), whole + 3 * turned

    def _declares_room(self, run: Pass) -> bool:
        """Whether heads are plain ones: turned or not, after two norms or none."""
        part = self.part
        rotary = part.positions if isinstance(part.positions, Rotary) else None
        looked_up = isinstance(part.positions, RelativeBuckets) and self._scores_by_bucket(run)
        changed = (part.gating, part.v_norm, part.differential, part.indexer, part.kv_name, part.kv_from)
        changed += (part.temperature, (part.q_norm and part.rotate_first) or None)
        norms = [norm for norm in (part.q_norm, part.k_norm) if norm is not None]
        alike = not norms or (len(norms) == 2 and all(type(norm) is RMSNorm for norm in norms))
        turned = part.positions is None or rotary is not None
        kept = part.value_width == part.d_head and part.value_scale == 1.0
        fused = turned and not self._uses_reference(run) and self._mask(run) != "added"
        plain = self.plain and kept and alike and (rotary is not None or not norms)
        return plain and (fused or looked_up) and all(one is None for one in changed) and not part.chooses(run)

    def _scores_by_bucket(self, run: Pass) -> bool:
        """Whether the reference kernel adds biases of distances to the scores of as many key heads, and nothing else.

        Scores of a narrow dtype are widened, which is another order of tensors.
        """
        part = self.part
        alone = part.softcap is None and not part.sinks and run.kernel != "engine"
        return alone and run.width >= 4 and part.n_heads == part.n_kv_heads

    def _distances_peak(self, run: Pass, positions: Disentangled, pairs: int) -> int:
        """Returns the bytes while embedded distances become scores: the second term's products beside the first term.

        Then the two terms, their sum, and that scaled.
        """
        part = self.part
        met = (positions.n_rows + run.rows) * part.d_query * run.width
        products = run.rows * part.n_heads * positions.n_rows * run.width
        terms = positions.to_keys + positions.to_queries
        return max(met + products + terms * pairs, (terms + 1) * pairs)

    @property
    def _new_values(self) -> bool:
        """Whether values are another tensor than their projection."""
        return self.part.v_norm is not None or self.part.value_scale != 1.0

    def _padded(self, run: Pass) -> int:
        """Returns the bytes of the fused kernel's output, and of what it pads to the width of the wider of q and v."""
        part = self.part
        query, seen = run.rows * part.n_heads, run.batch * part.keys(run) * part.n_kv_heads
        width = max(part.d_head, part.mixed_width)
        padded = (query + seen) * width if part.d_head < width else seen * width if part.mixed_width < width else 0
        return (padded + query * width) * run.width

    def _reference_peak(self, run: Pass) -> int:
        """Scores twice, before and after masking, with the mask; or masked scores and probabilities, at least float32.

        With capping there are three: the scores, divided, and after tanh.
        """
        part = self.part
        pairs = run.tokens * part.keys(run)
        size = run.batch * part.n_heads * pairs
        mixed = run.rows * part.d_mixed * run.width
        masking = 2 * size * run.width + (2 * self._masked(run) if self._mask(run) in ("causal", "bool") else 0)
        softmax = size * run.width + max(size * run.width + mixed, 2 * 4 * size if run.width < 4 else 0)
        return max(masking, softmax, 3 * size * run.width if part.softcap is not None else 0)

    def _uses_reference(self, run: Pass) -> bool:
        part = self.part
        learned = isinstance(
            part.positions, RelativeBuckets | RelativeProjection | Disentangled
        )  # fused kernels compute no gradient of an added mask
        if run.kernel == "engine":
            return False
        return run.kernel == "reference" or part.softcap is not None or part.sinks or learned
