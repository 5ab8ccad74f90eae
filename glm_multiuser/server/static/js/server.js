/** Client of the server's routes. Paths are relative, for proxies with a path prefix. */

import { Failure, failureInStream, failureOf } from "./failures.js";
import { settings } from "./settings.js";
import { eventsOf } from "./stream.js";

// The server sends keep-alive comments more often than this; silence means a connection that died
// without being closed, as when a laptop changes its network.
const LONGEST_SILENCE = 60_000;
const STATUS_TIMEOUT = 5_000;

/**
 * Requests an answer and yields its parts: `{text}`, `{calls}`, `{finish}` and `{usage}`.
 * The model defaults to the one in the settings, then to the server's.
 * Throws a Failure; when `signal` aborts, whatever fetch throws.
 */
export async function* answerTo(messages, { user, model, signal }) {
  const silence = new AbortController();
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Session-Id": user },
    body: JSON.stringify({
      messages,
      stream: true,
      stream_options: { include_usage: true },
      ...settings.forRequest(),
      ...(model && { model }),
    }),
    signal: AbortSignal.any([signal, silence.signal]),
  });
  let watch;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => silence.abort(), LONGEST_SILENCE);
  };
  let finished = false;
  try {
    heard();
    for await (const data of eventsOf(response.body.pipeThrough(noticing(heard)))) {
      if (data === "[DONE]") return;
      for (const part of partsOf(data)) {
        finished ||= "finish" in part;
        yield part;
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof Failure) throw error;
    throw new Failure("lost");
  } finally {
    clearTimeout(watch);
  }
  if (!finished) throw new Failure("lost");
}

/** The names of the models offered by the server. */
export async function modelNames() {
  const response = await request("v1/models", {});
  const { data } = await response.json();
  return data.map((model) => model.id);
}

/** The server's status. */
export async function status() {
  const response = await request("status", { signal: AbortSignal.timeout(STATUS_TIMEOUT) });
  return response.json();
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("unreachable");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

function noticing(heard) {
  return new TransformStream({
    transform(chunk, controller) {
      heard();
      controller.enqueue(chunk);
    },
  });
}

function* partsOf(data) {
  const chunk = JSON.parse(data);
  if (chunk.error) throw failureInStream(chunk.error);
  // The last chunk carries the usage and has no choices.
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) yield { text: choice.delta.content };
  if (choice?.delta?.tool_calls) yield { calls: choice.delta.tool_calls };
  if (choice?.finish_reason) yield { finish: choice.finish_reason };
  if (chunk.usage) yield { usage: chunk.usage };
}
