"""The upstream names that the plugin replaces, each declared in one table, with what it replaces them by."""
