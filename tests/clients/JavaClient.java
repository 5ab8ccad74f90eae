// Java's own HttpClient, which offers HTTP/2 by `Upgrade: h2c`: a question, and a second turn.
// java JavaClient.java URL MODEL QUESTION SECOND_QUESTION
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.regex.Pattern;

public class JavaClient {
    public static void main(String[] arguments) throws Exception {
        String url = arguments[0], model = arguments[1];
        HttpClient client = HttpClient.newHttpClient();
        String asked = message("user", text(arguments[2]));
        String answer = ask(client, url, model, asked);
        String told = asked + ", " + message("assistant", answer) + ", ";
        String second = ask(client, url, model, told + message("user", text(arguments[3])));
        System.out.println("[" + answer + ", " + second + "]");
    }

    /** The content of the answer, as JSON has it. */
    static String ask(HttpClient client, String url, String model, String messages)
            throws Exception {
        String body = "{\"model\": " + text(model) + ", \"messages\": [" + messages + "]}";
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/v1/chat/completions"))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
        HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
        var found = Pattern.compile("\"content\":(\"(?:[^\"\\\\]|\\\\.)*\")").matcher(response.body());
        if (response.statusCode() != 200 || !found.find()) {
            throw new IllegalStateException(response.statusCode() + " " + response.body());
        }
        return found.group(1);
    }

    static String message(String role, String content) {
        return "{\"role\": \"" + role + "\", \"content\": " + content + "}";
    }

    static String text(String value) {
        return "\"" + value.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", "\\n") + "\"";
    }
}
