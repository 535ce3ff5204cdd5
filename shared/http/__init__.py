"""HTTP requests to endpoints that are not trusted, with bounded answers; nothing else imports httpx.

::

    request ──▶ within timeout_s as a whole, without redirects, cookies or compression
            ──▶ answer: at most largest_bytes, counted as they arrive ──▶ Answer.json: at most MOST_VALUES values
"""
