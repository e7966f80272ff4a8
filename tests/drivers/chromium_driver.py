"""Starts Chromium without a window: for tests of the page, and for its recording."""

from selenium import webdriver

__all__ = ["start_chromium"]

# Root's Chromium has no sandbox; it only sees pages of our own.
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def start_chromium(*more: str, size: tuple[int, int] | None = None) -> webdriver.Chrome:
    """Starts Debian's Chromium with these further arguments. Its profile is a new one, and what the console
    says is kept. Call `quit` at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in (*_ARGUMENTS, *more):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    if size is not None:
        device = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    return driver
