// The snapshots of GET /pool, shared by all parts of the page.

import { useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { call, events } from "./net.js";

/** Follows the feed and reconnects when it breaks. `feed(listener)` subscribes and returns how to unsubscribe. */
export function useFeed(again) {
  const listeners = useRef(new Set());
  const latest = useRef(null);
  const [state, setState] = useState("connecting");
  useEffect(() => {
    const stop = new AbortController();
    const publish = (snapshot) => {
      latest.current = snapshot;
      for (const listener of listeners.current) listener(snapshot);
    };
    follow(stop.signal, publish, setState);
    return () => stop.abort();
  }, [again]);
  const feed = (listener) => {
    listeners.current.add(listener);
    if (latest.current) listener(latest.current);
    return () => listeners.current.delete(listener);
  };
  return { feed, state };
}

async function follow(signal, publish, setState) {
  for (let wait = 500; !signal.aborted; wait = Math.min(wait * 2, 8000)) {
    try {
      for await (const event of events(await call("pool", { signal }))) {
        if (!event.data) continue;
        wait = 500;
        setState(event.data.state);
        publish(event.data);
      }
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
    }
    if (!signal.aborted) setState("lost");
    await new Promise((resume) => setTimeout(resume, wait));
  }
}

/** The latest snapshot, at most one every so many milliseconds. */
export function useSnapshot(feed, everyMs = 0) {
  const [snapshot, setSnapshot] = useState(null);
  useEffect(() => {
    let last = -everyMs;
    return feed((next) => {
      if (performance.now() - last < everyMs) return;
      last = performance.now();
      setSnapshot(next);
    });
  }, []);
  return snapshot;
}
