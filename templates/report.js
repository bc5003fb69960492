for (const button of document.querySelectorAll("button[data-copies]")) {
  const wanted = document.getElementById(button.dataset.copies);
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(wanted.textContent.trim());
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(wanted);
      button.textContent = "Selected: copy it with Ctrl+C";
    }
  });
}
