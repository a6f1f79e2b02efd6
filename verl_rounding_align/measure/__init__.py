"""Tools that measure: each returns rows (frozen dataclasses); ``report.py`` renders them."""
