// Search runs in a Worker, which browsers refuse to pages that are read from files. There, a hidden frame runs its script instead.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.inner = this.frame.contentWindow;
      this.inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data: structuredClone(data) });
        setTimeout(() => {
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        });
      };
      this.inner.importScripts = (...urls) =>
        urls.reduce((loaded, next) => loaded.then(() => this.load(next)), Promise.resolve());
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => {
          this.dispatchEvent(new ErrorEvent("error", { message: `cannot load ${url}` }));
          reject(new Error(`cannot load ${url}`));
        };
        this.frame.contentDocument.body.appendChild(script);
      });
    }

    postMessage(data) {
      const event = new this.inner.MessageEvent("message", { data: structuredClone(data) });
      this.ready.then(() => this.inner.dispatchEvent(event));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
