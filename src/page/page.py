"""The page at GET /, of page.html with the style and scripts that it names.

It is a client of the API as any other: it has no data of its own, and asks for a token where the API does.  Every
text reaches the document as a text node, and the answer's Content-Security-Policy lets nothing run but this script.
"""

from __future__ import annotations

from .. import text_of

DASHBOARD_PAGE = text_of("page.html")
