"""The client: `Client`, files, namespace calls. `import ffs` offers all of it. docs/client.md."""
