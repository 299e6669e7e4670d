// Browsers start no worker for a page that was opened from disk: there, the search runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        frame.onload = () => {
          const { contentDocument: page, contentWindow: inside } = frame;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = page.createElement("script");
          script.src = url;
          script.onload = () => resolve(inside);
          page.body.append(script);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      (await this.loaded).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
