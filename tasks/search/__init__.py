"""Tasks of a private search: what is asked, the records, the search itself, and what is told of its winner."""
