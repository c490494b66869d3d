"""What one of several ranks holds of a model, and what cannot be divided, by name. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asbuilt import spec
from asbuilt.errors import InputError
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import Part, walk
from asbuilt.train.recipe import Recipe

# Parts that are divided only where what they contain is.
AROUND = (spec.Model, spec.Block, spec.Branch, spec.Linear, spec.HeadNorm)


def copies(recipe: Recipe, ranks: int) -> int:
    """Returns ranks / (tensor x pipeline), those that share batches; raises InputError if that is not whole."""
    given = recipe.parallel
    if ranks % given.tensor:
        raise InputError(field="parallel.tensor", value=given.tensor, allowed=f"a divisor of the {ranks} ranks")
    ways = given.tensor * given.pipeline
    if ranks % ways:
        allowed = f"such that tensor x pipeline = {ways} divides the {ranks} ranks"
        raise InputError(field="parallel.pipeline", value=given.pipeline, allowed=allowed)
    return ranks // ways


def require_shares(recipe: Recipe, data: int) -> None:
    """Raises InputError unless `data` ranks can share a batch: its sequences, and with `context` their tokens."""
    given, batch = recipe.parallel, recipe.data.batch
    if data % given.context:
        allowed = f"a divisor of the {data} ranks that share batches"
        raise InputError(field="parallel.context", value=given.context, allowed=allowed)
    shares = data // given.context
    if batch % shares:
        allowed = f"a multiple of {shares}"
        raise InputError(f"{shares} ranks share a batch equally", field="data.batch", value=batch, allowed=allowed)


def tensor_share(model: spec.Model, tensor: int, vocabulary: bool = True) -> spec.Model:
    """Returns what one of `tensor` ranks holds and computes of a model, as the parts say (`Part.shard`).

    Without `vocabulary` it has the whole embedding and head. Raises InputError naming what cannot be divided: sizes
    that are no multiples, and parts whose ranks would need more of each other than sums.
    """
    if tensor == 1:
        return model
    reads = {*model.reads} - {"tokens", "types"}
    if reads:
        raise _refused(tensor, f"the model reads {' and '.join(sorted(reads))} too")
    try:
        own = model.shard(tensor)
    except InputError as error:
        raise _refused(tensor, f"{error.field} = {error.value} must be {error.allowed}") from error
    if not vocabulary:
        own = replace(own, embedding=model.embedding, head=model.head)
    for path, part in walk(model):
        mine = own.at(path) if path else own
        if mine != part and (why := _reason(part, mine)):
            raise _refused(tensor, f"{path} ({type(part).__name__}): {why}")
    return own


def require_spread(model: spec.Model, ranks: int) -> None:
    """Raises InputError naming what keeps a model's experts from being spread over so many ranks."""
    if ranks == 1:
        return
    found = [(path, part) for path, part in walk(model) if part.spreads()]
    if not found:
        raise InputError("the model has no experts", field="parallel.expert", value=ranks, allowed="1")
    for path, part in found:
        if not isinstance(part, spec.MixtureOfExperts):
            problem = f"{path} ({type(part).__name__}): ranks cannot send rows to it"
            raise InputError(problem, field="parallel.expert", value=ranks, allowed="1")
        if part.n_experts % ranks:
            problem = f"{path}: n_experts = {part.n_experts} must be a multiple of the ranks"
            raise InputError(problem, field="parallel.expert", value=ranks)
    for path, part in walk(model):
        if isinstance(part, spec.Block) and (part.weights_from is not None or part.weights_name is not None):
            problem = f"{path} runs the weights of another block"
            raise InputError(problem, field="parallel.expert", value=ranks, allowed="1")


def require_stages(model: spec.Model, recipe: Recipe) -> None:
    """Raises InputError naming what keeps a model, or a recipe, from a pipeline of so many stages."""
    stages = recipe.parallel.pipeline
    if stages > 1 and (why := _not_staged(model, recipe)):
        fix = "leave it at 1, or divide by parallel.tensor or parallel.shard"
        raise InputError(why, field="parallel.pipeline", value=stages, fix=fix)
    require_chunks(model, recipe)


def require_chunks(model: spec.Model, recipe: Recipe) -> None:
    """Raises InputError unless blocks and micro-batches divide into equal chunks and whole rounds."""
    ranks, chunks, micro_batches = recipe.parallel.pipeline, recipe.parallel.interleave, recipe.step.accumulate
    if chunks == 1:
        return
    if ranks == 1:
        problem, allowed = "parallel.pipeline = 1 has no stages", "1"
    elif model.n_layers % (ranks * chunks):
        problem = f"{ranks} ranks x {chunks} chunks must divide the model's {model.n_layers} blocks"
        whole = [n for n in range(1, model.n_layers + 1) if model.n_layers % (ranks * n) == 0]
        allowed = " or ".join(map(str, whole or [1]))
    elif micro_batches % ranks:
        problem = f"step.accumulate = {micro_batches} must be a multiple of parallel.pipeline = {ranks}"
        allowed = "1"
    else:
        return
    raise InputError(problem, field="parallel.interleave", value=chunks, allowed=allowed)


def _not_staged(model: spec.Model, recipe: Recipe) -> str:
    """Returns why stages cannot train a model; empty if they can."""
    stages, data = recipe.parallel.pipeline, recipe.data
    if stages > model.n_layers:
        return f"the model has {model.n_layers} blocks"
    if isinstance(model.head, spec.TiedHead):
        return "the head is tied to the embedding, which another stage has"
    if recipe.step.accumulate < stages:
        return f"step.accumulate = {recipe.step.accumulate} must be at least as many micro-batches"
    if data.objective != "next" or data.packing != "stream" or data.chat or data.document_mask:
        return "stages pass on texts without padding alone, of the objective next and without document_mask"
    if recipe.parallel.shard != 1:
        return "each rank of a stage holds all of it: parallel.shard must be 1"
    for path, part in walk(model):
        if type(part) not in STAGED:
            return f"{path or 'the model'} ({type(part).__name__}): stages do not run it"
        for name in BETWEEN:
            if getattr(part, name, None):
                return f"{path} ({type(part).__name__}): {name} passes from block to block beside the stream"
    return ""


def require_context(model: spec.Model, recipe: Recipe) -> None:
    """Raises InputError naming what keeps ranks from dividing the sequences of a model, or a recipe, by tokens."""
    ranks = recipe.parallel.context
    if ranks > 1 and (why := _not_cut(model, recipe)):
        fix = "leave it at 1, or divide by parallel.shard or parallel.tensor"
        raise InputError(why, field="parallel.context", value=ranks, fix=fix)


def _not_cut(model: spec.Model, recipe: Recipe) -> str:
    """Returns why sequences cannot be divided by tokens; empty if they can."""
    ranks, data = recipe.parallel.context, recipe.data
    if data.objective != "next" or data.packing != "stream" or data.chat or data.preferences or data.document_mask:
        return "ranks divide texts without padding alone, of the objective next and without document_mask"
    if data.context % (2 * ranks):
        return f"data.context = {data.context} must be a multiple of {2 * ranks}: each rank has two runs of tokens"
    if {*model.reads} != {"tokens"} or not model.decodes:
        return "ranks divide the texts of decoders alone"
    if recipe.experts.capacity:
        return "experts.capacity is of a whole sequence, which no rank has"
    for path, part in walk(model):
        if why := _reaches(part):
            return f"{path} ({type(part).__name__}): {why}"
    return ""


def _reaches(part: Part) -> str:
    """Returns how a part reaches other tokens, if not through keys and values that ranks gather."""
    if isinstance(part, spec.Attention | spec.LatentAttention):
        if part.indexer is not None:
            return "its indexer chooses among the tokens of all ranks"
        if isinstance(part, spec.Attention) and part.caches_input:
            return "ranks gather keys and values, not what they are made of"
        if not isinstance(part.positions, spec.Rotary | spec.Alibi | None):
            return f"positions of the kind {type(part.positions).__name__} take neighbours to be next to each other"
        return ""
    if isinstance(part, spec.TokenEmbedding) and part.ngrams is not None:
        return "n-grams are of tokens that other ranks have"
    if isinstance(part, spec.MixtureOfExperts) and part.capacity is not None:
        return "its capacity is of a whole sequence, which no rank has"
    if isinstance(part, Mixer) or part.remembers():
        return "its state, or window, passes from the tokens of one rank to those of the next"
    return ""


def _refused(tensor: int, why: str) -> InputError:
    fix = "leave it at 1, or divide by parallel.shard alone"
    return InputError(why, field="parallel.tensor", value=tensor, fix=fix)


def _reason(part: Part, own: Part) -> str:
    """Returns why a part cannot be divided as `own`; empty if it can."""
    if isinstance(part, AROUND):
        return ""
    check = CHECKS.get(type(part))
    return "ranks cannot compute it together" if check is None else check(part, own)


def _attention(part: spec.Attention, own: spec.Attention) -> str:
    if part.n_kv_heads * own.n_heads != own.n_kv_heads * part.n_heads:
        return f"n_kv_heads = {part.n_kv_heads} must be a multiple of the ranks"
    for name in ("indexer", "differential"):
        if getattr(part, name) is not None:
            return f"{name} is not divided"
    if not isinstance(part.positions, spec.Rotary | None):
        return f"positions of the kind {type(part.positions).__name__} are not divided"
    for name in ("q_norm", "k_norm"):
        if isinstance(norm := getattr(part, name), spec.RMSNorm | spec.LayerNorm) and norm.d != part.d_head:
            return f"{name} is over all heads"
    return ""


def _gated(part: spec.GatedMLP, own: spec.GatedMLP) -> str:
    return "its sparsity is by the mean over all columns" if part.sparsity is not None else ""


def _mixture(part: spec.MixtureOfExperts, own: spec.MixtureOfExperts) -> str:
    # its sum is one over the ranks, at its end: what comes before must be linear in a rank's part
    if part.bias or part.latent_bias or (part.shared is not None and part.shared.bias):
        return "each rank would add the biases of its last maps"
    for name in ("post_norm", "shared_post_norm"):
        if getattr(part, name) is not None:
            return f"{name} is of a sum over the ranks"
    return ""


def _embedding(part: spec.TokenEmbedding, own: spec.TokenEmbedding) -> str:
    if part.ngrams is not None:
        return "tables of n-grams are not divided; parallel.vocabulary=false leaves them whole"
    return "rows beyond the vocabulary; parallel.vocabulary=false leaves it whole" if part.extra else ""


def _plain(part: Part, own: Part) -> str:
    return ""


# Parts that need nothing but the stream of the block before theirs, and fields that ask for more.
STAGED = (
    spec.LanguageModel,
    spec.Block,
    spec.Branch,
    spec.Linear,
    spec.Attention,
    spec.MLP,
    spec.GatedMLP,
    spec.RMSNorm,
    spec.LayerNorm,
    spec.HeadNorm,
    spec.TokenEmbedding,
    spec.LearnedPositions,
    spec.Rotary,
    spec.Head,
)
BETWEEN = ("kv_name", "kv_from", "weights_name", "weights_from", "updates", "predictors")

CHECKS: dict[type[Part], Callable[[Any, Any], str]] = {
    spec.Attention: _attention,
    spec.MLP: _plain,
    spec.GatedMLP: _gated,
    spec.MixtureOfExperts: _mixture,
    spec.TokenEmbedding: _embedding,
    spec.Head: _plain,
    spec.TiedHead: _plain,
}
