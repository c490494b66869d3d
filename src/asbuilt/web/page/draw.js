// Which panels are drawn of which documents, `now` and, where the model is changed, `before`; `open` shows their JSON.
import { answer } from "./figures.js";
import { measured } from "./measured.js";
import { parameters, steps, tree } from "./model.js";
import { memory, roofline, speed, users } from "./serving.js";
import { training } from "./training.js";

export function panels(now, before, open) {
  const made = [];
  if (now.measure) made.push(measured(now, open));
  if (now.describe || now.serve || now.train) made.push(answer(now, before, open));
  if (now.serve) made.push(memory(now, before?.serve ? before : null, open));
  if (now.curves) made.push(roofline(now, before, open));
  if (now.curves?.users.length && now.serve) made.push(users(now, before, open));
  if (now.serve?.sweep.length) made.push(speed(now, before, open));
  if (now.describe) made.push(parameters(now, before, open));
  if (now.train) made.push(training(now, before?.train ? before : null, open));
  if (now.describe) made.push(tree(now, open), steps(now, open));
  return made.filter(Boolean);
}
