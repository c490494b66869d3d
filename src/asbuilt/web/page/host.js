// The panels of what host memory holds: layers and experts that its processor computes, and caches that wait.
import { bytes, scaled, seconds, whole } from "./format.js";
import { compared, panel, range } from "./parts.js";

function kept({ offload: o, context, decode }) {
  const what = [o.blocks_in_host && `${whole(o.blocks_in_host)} blocks`, o.blocks_with_experts_in_host && `the routed experts of ${whole(o.blocks_with_experts_in_host)} more`];
  const took = (where, minimum) => [o.expected.middle[where], seconds, `expected, ${range(o.expected, (one) => one[where])}`, `theoretical minimum ${seconds(minimum[where])}`, `a step of ${whole(decode.batch)}`];
  return [
    ["room", o.room_bytes, bytes, `of ${o.processor.name}, for weights and caches`, o.processor.source],
    ["weights there", o.weight_bytes, bytes, ["the embedding", ...what].filter(Boolean).join(", ")],
    ["cache of a user there", o.cache_bytes_per_user, bytes, `${whole(context)} tokens`],
    ["over the bus in a step", o.crossing_bytes_per_step, bytes, `at ${scaled(o.bus_bytes_per_second, "B/s")}`],
    ["step on the host", ...took("host", o.seconds_per_step)],
    ["step on the device", ...took("device", o.seconds_per_step)],
    ["step on the bus", ...took("bus", o.seconds_per_step)],
  ];
}

export function offloaded(now, before, open) {
  const was = before?.serve?.offload && kept(before.serve);
  return panel("Layers in host memory", "serve", open, { note: `One computes after the other: ${now.serve.offload.processor.name} what is in its memory, the device the rest.` },
    compared(kept(now.serve), was, "host"));
}

function waits({ kv_host: k, context }) {
  return [
    ["sequences", k.sequences, whole, `${bytes(k.bytes)} over ${bytes(k.bytes_of_a_sequence)}, of ${whole(context)} tokens each`],
    ["tokens", k.tokens, whole, "in sequences of the context"],
    ["to bring one back", k.expected.middle, seconds, range(k.expected, (one) => one), `minimum ${seconds(k.seconds)}: ${bytes(k.bytes_on_a_device)} of a device at ${scaled(k.bus_bytes_per_second, "B/s")}`],
    ["to compute it again", k.expected_prefill.middle, seconds, range(k.expected_prefill, (one) => one), `minimum ${seconds(k.prefill_seconds)}`],
  ];
}

export function waiting(now, before, open) {
  return panel("Cache in host memory", "serve", open, { note: "Of sequences that wait, for one copy of the model." },
    compared(waits(now.serve), before?.serve?.kv_host && waits(before.serve), "waiting"));
}
