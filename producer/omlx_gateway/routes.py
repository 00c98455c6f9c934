"""All that a gateway answers."""

from omlx_gateway import batches, completions, files, models, page

routes = [
    *completions.routes,
    *models.routes,
    *files.routes,
    *batches.routes,
    *page.routes,
]
