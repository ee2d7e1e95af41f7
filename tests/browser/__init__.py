"""Pages in a real browser: a Chromium of the system, driven by Playwright."""
