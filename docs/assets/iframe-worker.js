// Search runs in a worker, which browsers do not start for pages that are opened from a folder (file://).
// Here an invisible frame of the same page takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...scripts) => Promise.all(scripts.map(source => this.load(frame, source)))
      this.frame = frame
      this.ready = this.load(frame, script)
    }

    load(frame, source) {
      return new Promise((resolve, reject) => {
        const tag = frame.contentDocument.createElement("script")
        Object.assign(tag, { src: String(source), onload: resolve, onerror: reject })
        frame.contentDocument.body.append(tag)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
