// Talking to the server: the key, JSON, and streams of server-sent events over fetch (EventSource can neither POST nor
// send a header).

const KEY = "tokenteller.key";
let key = sessionStorage.getItem(KEY) ?? "";
let askForKey = () => {};

/** What the server said no with: its message and the numbers beside it. */
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

/** `callback` is called whenever the server wants a key that it did not get. */
export function onKeyWanted(callback) {
  askForKey = callback;
}

/** A response that went well; throws a Refusal with the server's own words otherwise. */
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
  const told = await response.json().catch(() => ({}));
  throw new Refusal(response.status, told.error ?? {});
}

/** The events of a stream as they come: {data} with parsed JSON, or {comment}. Ends at [DONE] or at the end. */
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
