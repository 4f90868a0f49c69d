// Talking to the server: the key, JSON, and streams of server-sent events over fetch (EventSource can neither POST nor
// send a header).

const KEY = "tokenteller.key";
let key = sessionStorage.getItem(KEY) ?? "";
let askForKey = () => {};

/** An error response of the server, with its message and numbers. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error.message ?? `the server answered ${status}`);
    this.status = status;
    this.error = error;
  }
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem(KEY, value);
}

/** `callback` is called when the server asks for an API key. */
export function onKeyNeeded(callback) {
  askForKey = callback;
}

/** A successful response. Throws a Refusal otherwise. */
export async function call(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  const answer = await response.json().catch(() => ({}));
  throw new Refusal(response.status, answer.error ?? {});
}

/** The events of a stream: {data} with parsed JSON, or {comment}. Ends at [DONE] or with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith(":")) yield { comment: block.slice(1).trim() };
        else if (block === "data: [DONE]") return;
        else if (block.startsWith("data: ")) yield { data: JSON.parse(block.slice(6)) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
