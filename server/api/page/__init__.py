"""The page at `/`: static files, served with a policy that lets nothing in from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HERE = Path(__file__).parent
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again each time, answered 304
}


class PageFiles(StaticFiles):
    """The files beside this one that a browser may have."""

    KINDS = (".css", ".js", ".svg", ".txt")

    async def get_response(self, path: str, scope: Scope) -> Response:
        if not path.endswith(self.KINDS):
            path = "no such file"
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def attach(app: FastAPI) -> None:
    """Adds the page to the app, after all other routes."""

    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(HERE / "index.html", headers=HEADERS)

    app.mount("/page", PageFiles(directory=HERE))
